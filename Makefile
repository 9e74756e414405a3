.PHONY: test demo attack bench lint

test:  ## what must pass before a commit
	python3 ci/leg.py

demo:  ## a conversation with a scripted stand-in, through the real server
	python3 ci/leg.py --keep demo

attack:  ## load, kill -9, mutated requests, stalled readers, agents for minutes: what is left behind
	python3 ci/leg.py --keep attack

bench:  ## speed, against the host's own functions
	python3 ci/leg.py --keep bench

lint:
	python3 ci/leg.py --keep lint
