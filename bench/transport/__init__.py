"""What the network allows, and how near streams and datagrams come to it."""
