// Package cluster_test has the tests of several nodes that need no inside of codeq: those of
// simulated clusters, with network, disks and clocks in memory, and those on real sockets.
package cluster_test

import (
	"testing"

	"codeq/internal/testkit"
)

func TestMain(m *testing.M) { testkit.Main(m) }
