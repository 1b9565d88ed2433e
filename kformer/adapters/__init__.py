"""Adapters: a few weights beside frozen ones, trained, folded in, or kept in files of their own."""
