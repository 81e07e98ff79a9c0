package repotest

import (
	"bytes"
	"go/ast"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestRootIsSmall: the root holds the API and the pipeline, in files that one can find one's way
// in.
func TestRootIsSmall(t *testing.T) {
	t.Parallel()
	inRoot(t)
	paths, err := filepath.Glob("*.go")
	require.NoError(t, err)
	files, lines := 0, 0
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		files++
		lines += bytes.Count(text, []byte("\n"))
	}
	require.Positive(t, files)
	require.LessOrEqual(t, files, 40)
	require.LessOrEqual(t, lines, 11854)
}

// TestShardIsSmall: a shard's owner has few fields, and its methods are in few files.
func TestShardIsSmall(t *testing.T) {
	t.Parallel()
	inRoot(t)
	fset, all := Sources(t)
	fields, files := 0, make(map[string]bool)
	for _, file := range all["."] {
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if receiver(n) == "shard" {
					files[fset.Position(n.Pos()).Filename] = true
				}
				return false
			case *ast.TypeSpec:
				if of, ok := n.Type.(*ast.StructType); ok && n.Name.Name == "shard" {
					for _, field := range of.Fields.List {
						fields += max(1, len(field.Names))
					}
				}
			}
			return true
		})
	}
	require.Positive(t, fields)
	require.LessOrEqual(t, fields, 25)
	require.NotEmpty(t, files)
	require.LessOrEqual(t, len(files), 6, "%v", files)
}

// TestSurfaceOfRules bounds the exported names of engine, and the functions and methods of ready;
// docs/architecture/1-overview.md lists their kinds.
func TestSurfaceOfRules(t *testing.T) {
	t.Parallel()
	inRoot(t)
	_, all := Sources(t)
	probes := []string{"Probe", "Usage", "MostTurns", "MostUniques"}
	var forTests, others, constants int
	count := func(of, name string) {
		switch {
		case !ast.IsExported(name) || of != "" && !ast.IsExported(of):
		case of == "Probe" || slices.Contains(probes, name):
			forTests++
		default:
			others++
		}
	}
	for _, file := range all[filepath.Join("internal", "engine")] {
		for _, decl := range file.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				count(receiver(d), d.Name.Name)
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch spec := spec.(type) {
					case *ast.TypeSpec:
						count("", spec.Name.Name)
					case *ast.ValueSpec:
						for _, name := range spec.Names {
							if name.IsExported() {
								constants++
							}
						}
					}
				}
			}
		}
	}
	functions := 0
	for _, file := range all[filepath.Join("internal", "ready")] {
		for _, decl := range file.Decls {
			if d, ok := decl.(*ast.FuncDecl); ok && ast.IsExported(d.Name.Name) && receiver(d) != "window" {
				functions++
			}
		}
	}
	require.LessOrEqual(t, functions, 25, "functions and methods of ready")
	require.LessOrEqual(t, others, 141, "types, functions and methods")
	require.LessOrEqual(t, constants, 75, "constants and variables")
	require.LessOrEqual(t, forTests, 14, "what tests of the packages above look at")
}

// TestPackagesAreFew: internal has few packages, each with much behind a small surface. The data
// structures below container, which know nothing of tasks, count as one.
func TestPackagesAreFew(t *testing.T) {
	t.Parallel()
	inRoot(t)
	packages := make(map[string]bool)
	require.NoError(t, filepath.WalkDir("internal", func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && filepath.Ext(path) == ".go" {
			dir := filepath.ToSlash(filepath.Dir(path))
			if strings.HasPrefix(dir, "internal/container/") {
				dir = "internal/container"
			}
			packages[dir] = true
		}
		return err
	}))
	require.NotEmpty(t, packages)
	require.LessOrEqual(t, len(packages), 37, "%v", slices.Sorted(maps.Keys(packages)))
}
