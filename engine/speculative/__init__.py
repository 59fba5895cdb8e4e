"""Speculative decoding: drafts of the next tokens, and what a step needs to check them.

A token is a function of prefix, seed and position. So a draft is compared with the token that
would have come anyway, and no drafter can change an output.
"""
