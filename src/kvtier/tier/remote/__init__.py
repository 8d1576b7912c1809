"""Byte stores behind one Connector contract, one file a back end."""
