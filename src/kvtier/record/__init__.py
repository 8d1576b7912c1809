"""Envelopes, codecs, checksums: the self-describing form in which every tier keeps a part."""
