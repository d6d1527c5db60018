"""What all rooms may use and no subject of the library: files, imports, logs and checks."""
