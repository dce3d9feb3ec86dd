"""Where the two services are put together: the Ray Serve application, the command line, the demo."""
