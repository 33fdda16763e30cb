"""The keeper: one small process per backend that makes sandboxes and starts everything in them.

It imports nothing but the standard library, enters a user namespace of its own before the first sandbox,
sees of the host's files only what sandboxes may see, and ends its sandboxes when the process that started
it goes away without saying so.
"""
