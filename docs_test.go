package codeq_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// documentation is what users read of the package, with its examples.
func documentation(t *testing.T) (*token.FileSet, *doc.Package) {
	fset := token.NewFileSet()
	var files []*ast.File
	names, err := filepath.Glob("*.go")
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") && !strings.HasPrefix(name, "example_") {
			continue
		}
		file, err := parser.ParseFile(fset, name, nil, parser.ParseComments)
		require.NoError(t, err)
		files = append(files, file)
	}
	p, err := doc.NewFromFiles(fset, files, "codeq")
	require.NoError(t, err)
	return fset, p
}

// exportedFuncs returns the functions and methods of the package, as in Open and Queue.Claim.
func exportedFuncs(p *doc.Package) map[string]*doc.Func {
	all := make(map[string]*doc.Func)
	for _, f := range p.Funcs {
		all[f.Name] = f
	}
	for _, typ := range p.Types {
		for _, f := range typ.Funcs {
			all[f.Name] = f
		}
		for _, f := range typ.Methods {
			all[typ.Name+"."+f.Name] = f
		}
	}
	return all
}

// ofInterfaces are methods that other packages call: fmt, errors, encoding, and codeq its codecs.
var ofInterfaces = []string{
	"String", "Error", "Is", "Unwrap", "MarshalText", "UnmarshalText", "Marshal", "Unmarshal",
}

// TestExamples: each function and method that users call has an example of its name that runs.
func TestExamples(t *testing.T) {
	t.Parallel()
	_, p := documentation(t)
	funcs := exportedFuncs(p)
	require.Greater(t, len(funcs), 80)
	for name, f := range funcs {
		runs := slices.ContainsFunc(f.Examples, func(e *doc.Example) bool { return e.Output != "" || e.EmptyOutput })
		if !runs && !slices.Contains(ofInterfaces, f.Name) {
			t.Errorf("%s has no example that runs", name)
		}
	}
}
