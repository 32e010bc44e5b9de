"""Keeping a running server whole: restarts, files, devices, cores, orphans."""
