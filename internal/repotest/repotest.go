// Package repotest has the tests that only read the repository: its documents, its structure, its
// imports, the numbers that stay for good. They parse sources, and link none of them.
package repotest

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Root returns the root of the repository: the next directory above with the go.mod of codeq.
func Root() (string, error) {
	dir, err := os.Getwd()
	for err == nil {
		text, readErr := os.ReadFile(filepath.Join(dir, "go.mod"))
		if readErr == nil && bytes.HasPrefix(text, []byte("module codeq\n")) {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", readErr
		}
		dir = filepath.Dir(dir)
	}
	return "", err
}

// Sources parses the files of the library and those below other directories, without tests. It
// returns them by directory, relative to the root.
func Sources(t testing.TB, others ...string) (*token.FileSet, map[string][]*ast.File) {
	t.Helper()
	root, err := Root()
	require.NoError(t, err)
	all := make(map[string][]*ast.File)
	fset := token.NewFileSet()
	for _, below := range append([]string{".", "internal"}, others...) {
		require.NoError(t, fs.WalkDir(os.DirFS(root), below, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && below == "." && path != ".":
				return fs.SkipDir
			case d.IsDir(), !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
				return nil
			}
			text, err := os.ReadFile(filepath.Join(root, path))
			if err != nil {
				return err
			}
			f, err := parser.ParseFile(fset, path, text, 0)
			dir := filepath.Dir(filepath.FromSlash(path))
			all[dir] = append(all[dir], f)
			return err
		}))
	}
	return fset, all
}
