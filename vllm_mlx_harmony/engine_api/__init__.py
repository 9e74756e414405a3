"""What engines and the front end agree on: the interface of engines, a request and its steps."""
