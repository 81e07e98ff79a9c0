// Package testkit has what tests of several packages share: flags for chance and sizes, and file
// systems that fail or are full.
package testkit

import (
	"flag"
	"math/rand/v2"
	"testing"
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
