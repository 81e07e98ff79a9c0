// Package benchstat writes results in the format of Go's benchmarks, and compares them by
// benchstat.
package benchstat

import (
	"bytes"
	"fmt"
	"math"
	"os"
	"strings"
)

// Result is a line of a benchmark. Values that are NaN are left out.
type Result struct {
	Name   string // without "Benchmark"
	N      int64  // cycles
	Values []Value
}

// Value is a number with its unit.
type Value struct {
	Unit  string
	Value float64
}

// Write writes a file for benchstat, with three decimals.
func Write(path string, results []Result) error {
	var text bytes.Buffer
	for _, r := range results {
		fmt.Fprintf(&text, "Benchmark%s %d", r.Name, r.N)
		for _, v := range r.Values {
			if !math.IsNaN(v.Value) {
				fmt.Fprintf(&text, " %v %s", math.Round(1000*v.Value)/1000, v.Unit)
			}
		}
		text.WriteByte('\n')
	}
	return os.WriteFile(path, text.Bytes(), 0o644)
}

// Word returns a text as a part of a name, with dashes in place of spaces.
func Word(text string) string { return words.Replace(text) }

var words = strings.NewReplacer(", ", "-", ": ", "-", " ", "-")
