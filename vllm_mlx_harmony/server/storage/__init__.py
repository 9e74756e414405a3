"""What outlives a request: stored responses and background responses, here and on other servers."""
