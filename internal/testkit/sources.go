package testkit

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Sources are the files of the library by package directory, and those below other directories;
// for tests of the package in the root.
func Sources(t testing.TB, others ...string) (*token.FileSet, map[string][]*ast.File) {
	t.Helper()
	all := make(map[string][]*ast.File)
	fset := token.NewFileSet()
	for _, root := range append([]string{".", "internal"}, others...) {
		require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && root == "." && path != ".":
				return filepath.SkipDir
			case d.IsDir(), !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
				return nil
			}
			f, err := parser.ParseFile(fset, path, nil, 0)
			all[filepath.Dir(path)] = append(all[filepath.Dir(path)], f)
			return err
		}))
	}
	return fset, all
}
