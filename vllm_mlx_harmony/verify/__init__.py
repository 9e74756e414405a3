"""verify: whether a server of OpenAI's or Anthropic's APIs does what they promise.

It speaks HTTP alone, so it imports nothing of the server, and works with any.
"""
