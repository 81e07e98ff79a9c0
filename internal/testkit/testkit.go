// Package testkit has helpers for tests of several packages that need none of these packages: flags
// for seeds and sizes, file systems that fail or are full, hostile user code.
package testkit

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var (
	seed = flag.Uint64("seed", 0, "what tests draw their chances from that print a seed; 0: another one each time")
	long = flag.Bool("long", false, "large sizes and many rounds, where docs/testing.md says so")
)

// Seed returns the seed of a test's random numbers.
func Seed() uint64 {
	if *seed != 0 {
		return *seed
	}
	return rand.Uint64()
}

// Seeded returns the random numbers of a test, and logs their seed.
func Seeded(t testing.TB) *rand.Rand {
	seed := Seed()
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// Sized returns the second size with -long, otherwise the first.
func Sized(usual, large int) int {
	if *long {
		return large
	}
	return usual
}

// OnlyLong skips a test without -long.
func OnlyLong(t testing.TB, why string) {
	t.Helper()
	if !*long {
		t.Skip(why + ": with -long")
	}
}

// FreePorts returns the first of n consecutive free ports of loopback, drawn by intN. They are
// below the ports that the system assigns to connections, so that a port is still free after the
// restart of a node.
func FreePorts(t testing.TB, intN func(n int) int, n int) (first int) {
	t.Helper()
	for {
		first = 10_000 + intN(20_000)
		free := 0
		for i := range n {
			if l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", first+i)); err == nil {
				free++
				require.NoError(t, l.Close())
			}
		}
		if free == n {
			return first
		}
	}
}

// Beyond31Bits is 2^31, which is negative where an int has 32 bits.
var Beyond31Bits = func(n int64) int { return int(n) }(1 << 31)

// ErrDisk is the reason of an injected failure of a shard.
var ErrDisk = errors.New("disk on fire")

// ManyQueues returns the names of n queues, and weights for them.
func ManyQueues(n int) (names []string, weights map[string]int) {
	weights = make(map[string]int)
	for i := range n {
		names = append(names, fmt.Sprintf("queue %d", i))
		weights[names[i]] = 1 + i%7
	}
	return names, weights
}

// InTime returns the error of call, and fails the test if call takes too long.
func InTime(t testing.TB, what string, call func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- call() }()
	select {
	case err := <-done:
		return err
	case <-time.After(20 * time.Second):
		stacks := make([]byte, 4<<20)
		require.FailNow(t, what+" hangs", "%s", stacks[:runtime.Stack(stacks, true)])
		return nil
	}
}
