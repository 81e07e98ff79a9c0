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
	files, lines, tests := 0, 0, 0
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			tests++
			continue
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		files++
		lines += bytes.Count(text, []byte("\n"))
	}
	require.Positive(t, files)
	require.LessOrEqual(t, files, 46)
	require.LessOrEqual(t, lines, 12_500)
	require.LessOrEqual(t, tests, 85)
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

// TestStateIsSmall: the rules of a shard are several structs with methods of their own. State joins
// them, and has few fields and methods itself, in few files. No other package writes its fields, or
// those of a queue.
func TestStateIsSmall(t *testing.T) {
	t.Parallel()
	inRoot(t)
	fset, all := Sources(t)
	engine := filepath.Join("internal", "engine")
	fields := make(map[string]bool) // that others may read
	var of, methods, lines int
	files, own := make(map[string]bool), make(map[string]bool)
	for _, file := range all[engine] {
		name := fset.Position(file.Pos()).Filename
		if base := filepath.Base(name); !strings.HasPrefix(base, "check") && base != "nextformat.go" {
			files[name] = true
			lines += fset.Position(file.FileEnd).Line - 1
		}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.FuncDecl:
				if receiver(n) == "State" {
					methods++
					own[name] = true
				}
				return false
			case *ast.TypeSpec:
				if st, ok := n.Type.(*ast.StructType); ok {
					for _, f := range st.Fields.List {
						if n.Name.Name == "State" {
							of += max(1, len(f.Names))
						}
						if slices.Contains([]string{"State", "round", "Instant", "names", "leases", "mail", "times", "ties", "suspects", "Queue", "Configured"}, n.Name.Name) {
							for _, id := range f.Names {
								fields[id.Name] = id.IsExported()
							}
						}
					}
				}
			}
			return true
		})
	}
	require.Positive(t, of)
	require.LessOrEqual(t, of, 20, "fields of State")
	require.Positive(t, methods)
	require.LessOrEqual(t, methods, 110, "methods of State")
	require.LessOrEqual(t, len(own), 15, "%v", own)
	require.LessOrEqual(t, len(files), 45, "files of engine, without checkers")
	require.LessOrEqual(t, lines, 8000, "lines of engine, without checkers")
	written := func(e ast.Expr) bool {
		sel, ok := e.(*ast.SelectorExpr)
		if !ok || !fields[sel.Sel.Name] {
			return false
		}
		switch x := sel.X.(type) {
		case *ast.Ident:
			return slices.Contains([]string{"rules", "state"}, x.Name)
		case *ast.SelectorExpr: // rules.F, rules.Names.F, c.Queue.F
			in, ok := x.X.(*ast.SelectorExpr)
			name := x.Sel.Name
			return slices.Contains([]string{"rules", "Rules", "Queue"}, name) || ok && in.Sel.Name == "rules"
		}
		return false
	}
	for dir, sources := range all {
		for _, file := range sources {
			if dir == engine {
				continue
			}
			ast.Inspect(file, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.AssignStmt:
					for _, e := range n.Lhs {
						require.False(t, written(e), "%v writes a field of the rules", fset.Position(n.Pos()))
					}
				case *ast.IncDecStmt:
					require.False(t, written(n.X), "%v writes a field of the rules", fset.Position(n.Pos()))
				}
				return true
			})
		}
	}
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
	require.LessOrEqual(t, others, 91, "types, functions and methods")
	require.LessOrEqual(t, constants, 66, "constants and variables")
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

// TestFilesOfTestsAreShort: a reader finds the test of a promise by the name of its file.
func TestFilesOfTestsAreShort(t *testing.T) {
	t.Parallel()
	inRoot(t)
	found := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		found++
		text, err := os.ReadFile(path)
		require.LessOrEqual(t, bytes.Count(text, []byte("\n")), 1000, path)
		return err
	}))
	require.Positive(t, found)
}
