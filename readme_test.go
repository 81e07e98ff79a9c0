package codeq

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestReadmeFigures: every measured number of the README stands in what the
// programs below bench have written.
func TestReadmeFigures(t *testing.T) {
	var results strings.Builder
	files, err := filepath.Glob("bench/results/*.md")
	require.NoError(t, err)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		results.Write(b)
	}
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	number := regexp.MustCompile(`\b\d{1,3}(,\d{3})+\b`)
	known := make(map[string]bool)
	for _, n := range number.FindAllString(results.String(), -1) {
		known[n] = true
	}
	checked := 0
	for section := range strings.SplitSeq(string(readme), "\n## ") {
		title, text, _ := strings.Cut(section, "\n")
		if title != "Figures" && title != "Replication" {
			continue
		}
		for row := range strings.Lines(text) {
			if strings.HasPrefix(row, "|") {
				for _, n := range number.FindAllString(row, -1) {
					require.True(t, known[n], "%s in %s", n, row)
					checked++
				}
			}
		}
	}
	require.Greater(t, checked, 20)
}
