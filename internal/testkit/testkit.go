// Package testkit has what tests of several packages share: flags for chance and sizes, and file
// systems that fail or are full.
package testkit

import (
	"encoding/hex"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var (
	seed = flag.Uint64("seed", 0, "what tests draw their chances from that print a seed; 0: another one each time")
	long = flag.Bool("long", false, "large sizes and many rounds, where TESTING.md says so")
)

// Seed is the number that a test draws its chances from.
func Seed() uint64 {
	if *seed != 0 {
		return *seed
	}
	return rand.Uint64()
}

// Seeded is the chance of a test, whose seed is told when the test fails.
func Seeded(t testing.TB) *rand.Rand {
	seed := Seed()
	t.Logf("-seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// Sized is the first of three sizes with -short, the last with -long, and else the one between.
func Sized(short, usual, large int) int {
	switch {
	case testing.Short():
		return short
	case *long:
		return large
	}
	return usual
}

// Unhex reads hexadecimal digits; blanks separate the fields.
func Unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// FreePorts returns the first of n ports of loopback on which nobody listens, drawn by intN. They
// are below those that the system gives to connections, so that a node finds its own free when it
// is back.
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
