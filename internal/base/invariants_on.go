//go:build invariants

package base

// Invariants is set in a build with the tag invariants: assertions run, and Pebble's as well.
const Invariants = true
