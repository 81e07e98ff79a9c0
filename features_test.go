package codeq

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFeatureTable: every example and test that FEATURES.md names exists, and every
// row has a test.
func TestFeatureTable(t *testing.T) {
	exists := make(map[string]bool)
	for _, pattern := range []string{"*_test.go", "codeqtest/*_test.go"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, name := range files {
			file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
			require.NoError(t, err)
			for _, d := range file.Decls {
				if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
					exists[f.Name.Name] = true
				}
			}
		}
	}
	text, err := os.ReadFile("FEATURES.md")
	require.NoError(t, err)
	names := regexp.MustCompile(`\b(Example|Test)[A-Z]\w*`)
	for row := range strings.Lines(string(text)) {
		if !strings.HasPrefix(row, "| ") || strings.HasPrefix(row, "| **") || strings.HasPrefix(row, "| feature ") {
			continue
		}
		found := names.FindAllString(row, -1)
		require.NotEmpty(t, found, row)
		require.Contains(t, found[len(found)-1], "Test", row)
		for _, name := range found {
			require.True(t, exists[name], "%s in %s", name, row)
		}
	}
}
