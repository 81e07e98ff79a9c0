package repotest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFeatureTable: every example and test that features.md, testing.md and replication.md name
// exists, and so does every test that .ci/run skips; every row of features.md, and every promise of
// testing.md, has a test.
func TestFeatureTable(t *testing.T) {
	t.Parallel()
	inRoot(t)
	exists := make(map[string]bool)
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				exists[f.Name.Name] = true
			}
		}
		return nil
	}))
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
	rows := func(name string, each func(row string, found []string)) {
		for row := range strings.Lines(read(name)) {
			if !strings.HasPrefix(row, "| ") || strings.HasPrefix(row, "| **") || strings.HasPrefix(row, "| feature ") {
				continue
			}
			found := names.FindAllString(row, -1)
			for _, name := range found {
				require.True(t, known(name), "%s in %s", name, row)
			}
			each(row, found)
		}
	}
	rows("docs/features.md", func(row string, found []string) {
		require.NotEmpty(t, found, row)
		require.Contains(t, found[len(found)-1], "Test", row)
	})
	for _, name := range []string{"docs/testing.md", "docs/replication.md"} {
		rows(name, func(string, []string) {})
	}
	_, promises, found := strings.Cut(read("docs/testing.md"), "\n## Acknowledged work\n")
	require.True(t, found)
	items := regexp.MustCompile(`(?m)^- .*(\n  .*)*`).FindAllString(promises, -1)
	require.Greater(t, len(items), 180)
	for _, item := range items {
		found := names.FindAllString(item, -1)
		require.True(t, len(found) > 0 || strings.Contains(item, "`.ci/") || strings.Contains(item, "`bench/"), item)
		for _, name := range found {
			require.True(t, known(name), "%s in %s", name, item)
		}
	}

	// What .ci/run leaves out: ^TestName$ and ^Test(One|Other)$.
	script, err := os.ReadFile(".ci/run")
	require.NoError(t, err)
	skipped := regexp.MustCompile(`\^(Test\w*)(?:\(([\w|]+)\))?\$`).FindAllStringSubmatch(string(script), -1)
	require.NotEmpty(t, skipped)
	for _, m := range skipped {
		for end := range strings.SplitSeq(m[2], "|") {
			require.True(t, exists[m[1]+end], "%s in .ci/run", m[1]+end)
		}
	}
}
