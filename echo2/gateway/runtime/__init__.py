"""The gateway's sockets and processes."""
