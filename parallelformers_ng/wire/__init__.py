"""How values cross between processes: frames on sockets, and what is encoded, signed or left behind as a handle."""
