"""Folders, tables and built-in tasks -> images and labels."""
