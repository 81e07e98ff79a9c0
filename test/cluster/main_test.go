// Package cluster_test has the tests of several nodes that need no internals of codeq: tests of
// simulated clusters, with network, disks and clocks in memory, and tests with real sockets.
package cluster_test

import (
	"testing"

	"codeq/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
