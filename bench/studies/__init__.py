"""Studies of training methods: accuracy and loss against time, bytes and seeds."""
