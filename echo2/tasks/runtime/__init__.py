"""The parts of the data plane that act: files, processes, other packages."""
