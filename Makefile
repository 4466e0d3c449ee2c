# make demo    two clusters with the same pod CIDR talk to each other, on this machine
# make test    every test
# make check   format, lints, licences and make test: what CI runs
# make bench   weft against wireguard-go
# make clean   removes what was built and what a killed run left behind
#
# Network namespaces and devices need root; as another user, sudo is asked for.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := demo
.PHONY: demo test check bench clean tools lint-tools peers build

CACHE  ?= $(HOME)/.cache/weft
TARGET := $(if $(CARGO_TARGET_DIR),$(CARGO_TARGET_DIR),$(CURDIR)/target)
SUDO   := $(if $(filter 0,$(shell id -u)),,sudo -E env PATH=$$PATH)
export WEFT_PEERS_DIR := $(CACHE)/bin

WIREGUARD_GO := v0.0.0-20260522210424-ecfc5a8d5446

demo: tools
	cargo build --release --locked --workspace --bins
	$(SUDO) $(TARGET)/release/demo $(ARGS)

# What users run is what the system tests run: the release build.
test: tools peers
	cargo build --release --locked --workspace --bins
	cargo test --locked --workspace --no-run
	rm -f $(TARGET)/skipped
	$(SUDO) env WEFT_BIN_DIR=$(TARGET)/release WEFT_SKIPPED=$(TARGET)/skipped cargo test --locked --workspace $(ARGS)
	@touch $(TARGET)/skipped; echo "skipped for want of a program: $$(wc -l < $(TARGET)/skipped)"; cat $(TARGET)/skipped

check: tools lint-tools
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	$(CACHE)/bin/cargo-deny --all-features --config .deny.toml check bans licenses sources
	$(MAKE) test

bench: tools peers
	cargo build --release --locked --workspace --bins --examples
	$(SUDO) $(TARGET)/release/bench $(ARGS)

clean:
	-$(SUDO) $(TARGET)/release/demo down
	cargo clean

# Debian's packages, installed only where a command is missing.
tools:
	@need=(); \
	for pair in nft:nftables ip:iproute2 ping:iputils-ping iptables:iptables sysctl:procps cc:build-essential; do \
	  PATH=$$PATH:/usr/sbin:/sbin command -v $${pair%%:*} >/dev/null || need+=($${pair##*:}); done; \
	if [ $${#need[@]} -gt 0 ]; then \
	  echo "installing $${need[*]}"; \
	  sudo=; [ $$(id -u) = 0 ] || sudo=sudo; \
	  $$sudo apt-get update -qq; \
	  $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $${need[*]} >/dev/null; fi

lint-tools:
	@cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1 || rustup component add rustfmt clippy
	@test -x $(CACHE)/bin/cargo-deny || { echo "building cargo-deny, once, a few minutes"; cargo install --quiet --locked --root $(CACHE) cargo-deny; }

# The other WireGuards that tests and benchmarks talk to. Without Go, those say that they were skipped.
peers:
	@if [ -x $(CACHE)/bin/wireguard ]; then :; \
	elif command -v go >/dev/null; then \
	  echo "building wireguard-go, once"; GOBIN=$(CACHE)/bin go install golang.zx2c4.com/wireguard@$(WIREGUARD_GO); \
	else echo "no Go here: what needs wireguard-go is skipped"; fi
