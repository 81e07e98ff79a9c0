# CONTRIBUTING.md says what each target does.
.DEFAULT_GOAL := check
.PHONY: check build vet repo test short race lint vuln cover fuzz bench bench-compare api figures ci

tool := go tool -modfile=$(CURDIR)/tools/go.mod
# The other modules of the repository. The tools have nothing to build.
modules := $(filter-out ./tools,$(patsubst %/go.mod,%,$(shell find . -mindepth 2 -name go.mod)))

# in-modules runs a command in the root and in all other modules, until one fails.
in-modules = set -e; for module in . $(modules); do echo "== $$module"; (cd $$module && $(1)); done

check: build vet repo

build:
	@$(call in-modules,go build -o /dev/null ./...)

vet:
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "gofmt needed: $$unformatted"; exit 1; }
	@$(call in-modules,go vet ./...)

test:
	go test ./...

short:
	go test -short ./...

repo:
	go test ./internal/repotest

race:
	go test -race -tags invariants -short -timeout 30m ./...

cover:
	go test -short -timeout 30m -coverpkg=./... -coverprofile=cover.out ./...
	go tool cover -func=cover.out | tail -n 1

lint:
	@$(call in-modules,$(tool) staticcheck ./... && $(tool) golangci-lint run ./...)

vuln:
	@$(call in-modules,$(tool) govulncheck ./...)

FUZZTIME ?= 2m
TARGETS ?= .*
fuzz:
	.ci/fuzz $(FUZZTIME) '$(TARGETS)'

BENCH ?= .
bench:
	go test ./bench -run '^$$' -bench '$(BENCH)' -benchtime 1x -timeout 0

COUNT ?= 10
bench-compare:
	@tools/bench-compare '$(BASE)' '$(COUNT)'

api:
	go test ./internal/repotest -run '^TestAPI$$' -api.update

figures:
	go test ./internal/repotest -run '^TestReadmeFigures$$' -readme.update

ci:
	.ci/run
