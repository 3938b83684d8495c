"""What methods learn: accuracy and loss against time, bytes and seeds."""
