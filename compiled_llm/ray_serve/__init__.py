"""The server as an application of Ray Serve: engines on the machines of a cluster, HTTP before them."""
