"""Services that a process of a run uses and that need threads or files: copies of output."""
