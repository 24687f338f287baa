"""What `serving.py` measures with: a load generator over plain sockets, and the figures that it yields."""
