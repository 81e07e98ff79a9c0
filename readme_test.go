package codeq

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var updateReadme = flag.Bool("readme.update", false, "TestReadmeFigures copies what README.md quotes from bench/results")

// quotation is what README.md has of a section of a file that a program below
// bench has written: its tables; of the section Machine, which is the
// file's head, when, of which commit and on what it was written.
var quotation = regexp.MustCompile(`(?s)(<!-- from (bench/results/\S+), ([^\n]+) -->\n).*?(<!-- end -->\n)`)

// TestReadmeFigures: each quotation in README.md is what its file says. In the
// rest of the sections that say what was measured, no table has numbers, and
// those of the prose, but for code, occur somewhere in the files that programs
// have written. The latter proves little for a small number, or for one that
// means something else there; and whether the words are true, nothing here tells.
func TestReadmeFigures(t *testing.T) {
	b, err := os.ReadFile("README.md")
	require.NoError(t, err)
	readme := string(b)
	quoted := quotation.ReplaceAllStringFunc(readme, func(q string) string {
		m := quotation.FindStringSubmatch(q)
		return m[1] + "\n" + quote(t, m[2], m[3]) + "\n" + m[4]
	})
	if *updateReadme {
		require.NoError(t, os.WriteFile("README.md", []byte(quoted), 0o644))
		readme = quoted
	}
	require.Equal(t, quoted, readme, "go test -run ReadmeFigures . -readme.update")

	number := regexp.MustCompile(`\d+([.,]\d+)*`)
	measured := make(map[string]bool)
	for _, file := range written(t) {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, n := range number.FindAllString(string(text), -1) {
			measured[n] = true
		}
	}
	code := regexp.MustCompile("(?s)```.*?```|`.*?`|\\]\\(.*?\\)")
	var checked []string
	for section := range strings.SplitSeq(quotation.ReplaceAllString(readme, ""), "\n## ") {
		title, text, _ := strings.Cut(section, "\n")
		if !slices.Contains([]string{"Backup", "Replication", "Figures"}, title) {
			continue
		}
		checked = append(checked, title)
		for line := range strings.Lines(code.ReplaceAllString(text, "")) {
			for _, n := range number.FindAllString(line, -1) {
				require.False(t, strings.HasPrefix(line, "|"), "%s: a table that is no quotation: %s", title, line)
				require.True(t, measured[n], "%s: no program has written %s: %s", title, n, line)
			}
		}
	}
	require.Equal(t, []string{"Backup", "Replication", "Figures"}, checked)
}

// written are the documents in bench/results but the one that a person writes.
func written(t *testing.T) []string {
	files, err := filepath.Glob("bench/results/*.md")
	require.NoError(t, err)
	return slices.DeleteFunc(files, func(file string) bool { return filepath.Base(file) == "README.md" })
}

// quote returns the tables of a section of a file, or of its head.
func quote(t *testing.T, file, title string) string {
	require.Contains(t, written(t), file)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	section, begin := "", []string{"|"}
	if title == "Machine" {
		section, _, _ = strings.Cut(string(b), "\n## ")
		begin = []string{"Written at ", "The disk did "}
	} else {
		_, rest, ok := strings.Cut(string(b), "\n## "+title+"\n")
		require.True(t, ok, "%s has no section %s", file, title)
		section, _, _ = strings.Cut(rest, "\n## ")
	}
	var parts []string
	for part := range strings.SplitSeq(section, "\n\n") {
		part = strings.Trim(part, "\n")
		if slices.ContainsFunc(begin, func(s string) bool { return strings.HasPrefix(part, s) }) {
			parts = append(parts, part+"\n")
		}
	}
	require.NotEmpty(t, parts, "%s, %s", file, title)
	return strings.Join(parts, "\n")
}
