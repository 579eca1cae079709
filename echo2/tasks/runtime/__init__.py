"""The data plane's I/O: files, processes, other packages."""
