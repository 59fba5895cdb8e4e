"""Layers of a decoder, each holding only this tensor parallel rank's share of its weights."""
