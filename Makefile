.PHONY: test demo bench lint

test:  ## every leg of the CI matrix that this machine can run
	python3 ci/leg.py all

demo:  ## a conversation with a scripted stand-in, through the real server
	python3 ci/leg.py --keep demo

bench:  ## speed, against the host's own functions
	python3 ci/leg.py --keep bench

lint:
	python3 ci/leg.py --keep lint
