package repotest

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFeatureTable: every example and test that features.md, testing.md and replication.md name
// exists, and so does every test that .ci/run skips; every feature, and every promise of
// testing.md, has a test.
func TestFeatureTable(t *testing.T) {
	t.Parallel()
	inRoot(t)
	code, err := namesOfCode()
	require.NoError(t, err)
	exists := code.used // test functions are declared, and used nowhere else
	names := regexp.MustCompile(`\b(Example|Test|Fuzz|Benchmark)[A-Z]\w*\*?`)
	// known reports whether there is the test, or one that begins with a name that ends with *.
	known := func(name string) bool {
		prefix, many := strings.CutSuffix(name, "*")
		if !many {
			return exists[name]
		}
		for name := range exists {
			if strings.HasPrefix(name, prefix) && name != prefix {
				return true
			}
		}
		return false
	}
	read := func(name string) string {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		return string(text)
	}
	// items yields the items of a document's lists from a heading on, and the rows of its tables,
	// with the names in each.
	item := regexp.MustCompile(`(?m)^- .*(\n  .*)*|^\| .*`)
	items := func(document, heading string) (n int) {
		_, text, ok := strings.Cut(read(document), "\n"+heading+"\n")
		require.True(t, ok, "%s: %s", document, heading)
		for _, text := range item.FindAllString(text, -1) {
			found := names.FindAllString(text, -1)
			for _, name := range found {
				require.True(t, known(name), "%s in %s: %s", name, document, text)
			}
			if strings.HasPrefix(text, "- ") {
				n++
				proved := len(found) > 0 && !strings.HasPrefix(found[len(found)-1], "Example")
				require.True(t, proved || strings.Contains(text, "`.ci/") || strings.Contains(text, "`bench/"), text)
			}
		}
		return n
	}
	require.Greater(t, items("docs/features.md", "## The cycle"), 130)
	require.Greater(t, items("docs/testing.md", "## Acknowledged work"), 180)
	items("docs/replication.md", "## What to do")
}
