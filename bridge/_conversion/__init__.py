"""The neutral form, both sides of it, and whether variables fit a module: no module in sight."""
