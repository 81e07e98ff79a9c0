//go:build !race

package testbase

const underRace = false
