"""What a whole PS, worker or run costs and reaches."""
