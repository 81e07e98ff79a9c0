package repotest

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
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
	inRoot(t)
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

// makeErrors return an error as a value, for a handler.
var makeErrors = []string{"DeadLetter", "RetryAfter", "Snooze"}

// ignoreEnd do their work whether ctx has ended or not.
var ignoreEnd = []string{"Queue.ClusterStatus", "Queue.Run", "Queue.ServeLocal", "ReportProgress", "SetMetadata"}

// TestErrorsAreListed: the documentation of whatever returns an error says which ones, that of a
// verb in a paragraph of their own.
func TestErrorsAreListed(t *testing.T) {
	t.Parallel()
	inRoot(t)
	_, p := documentation(t)
	n := 0
	for name, f := range exportedFuncs(p) {
		results := f.Decl.Type.Results
		if results == nil || slices.Contains(makeErrors, name) {
			continue
		}
		last := types.ExprString(results.List[len(results.List)-1].Type)
		switch {
		case last != "error" && !strings.HasSuffix(last, ", error]"), f.Name == "MarshalText", strings.HasPrefix(name, "JSON."):
			continue
		case f.Name == "UnmarshalText":
			require.Contains(t, f.Doc, "[ErrInvalid]", name)
			continue
		case f.Name == "Unwrap":
			continue
		}
		n++
		_, list, ok := strings.Cut("\n"+f.Doc, "\nErrors: ")
		if !ok || !regexp.MustCompile(`\[Err\w+\]|of the codec`).MatchString(list) {
			t.Errorf("%s: its documentation lists no errors", name)
			continue
		}
		params := types.ExprString(f.Decl.Type)
		if strings.Contains(params, "ctx context.Context") && !slices.Contains(ignoreEnd, name) {
			require.Regexp(t, `that\s+of\s+ctx`, list, "%s: the end of its ctx", name)
		}
	}
	require.Greater(t, n, 45)
}

// comment is one that users read; own are the names that it documents, with their members.
type comment struct {
	text string
	pos  token.Pos
	own  []string
}

func commentsOf(p *doc.Package) []comment {
	all := []comment{{text: p.Doc}}
	values := func(values []*doc.Value) {
		for _, v := range values {
			all = append(all, comment{v.Doc, v.Decl.Pos(), v.Names})
			for _, spec := range v.Decl.Specs {
				all = append(all, comment{spec.(*ast.ValueSpec).Doc.Text(), spec.Pos(), v.Names})
			}
		}
	}
	values(p.Consts)
	values(p.Vars)
	for name, f := range exportedFuncs(p) {
		all = append(all, comment{f.Doc, f.Decl.Pos(), append(strings.Split(name, "."), name)})
	}
	for _, typ := range p.Types {
		values(typ.Consts)
		values(typ.Vars)
		own := []string{typ.Name}
		for _, field := range fieldsOf(typ) {
			for _, name := range field.Names {
				own = append(own, name.Name)
			}
		}
		for _, field := range fieldsOf(typ) {
			all = append(all, comment{field.Doc.Text(), field.Pos(), own})
		}
		all = append(all, comment{typ.Doc, typ.Decl.Pos(), own})
	}
	return all
}

// fieldsOf are the fields of a struct, or the methods of an interface.
func fieldsOf(t *doc.Type) []*ast.Field {
	switch t := t.Decl.Specs[0].(*ast.TypeSpec).Type.(type) {
	case *ast.StructType:
		return t.Fields.List
	case *ast.InterfaceType:
		return t.Methods.List
	}
	return nil
}

// linkNames maps the names of exported things in comments to their names in links: a method of
// Queue is often named without its type.
func linkNames(p *doc.Package) map[string]string {
	links := make(map[string]string)
	values := func(values []*doc.Value) {
		for _, v := range values {
			for _, name := range v.Names {
				links[name] = name
			}
		}
	}
	values(p.Consts)
	values(p.Vars)
	for _, typ := range p.Types {
		links[typ.Name] = typ.Name
		values(typ.Consts)
		values(typ.Vars)
		for _, field := range fieldsOf(typ) {
			for _, name := range field.Names {
				links[typ.Name+"."+name.Name] = typ.Name + "." + name.Name
			}
		}
	}
	funcs := exportedFuncs(p)
	for name := range funcs {
		links[name] = name
	}
	for name := range funcs {
		if method, ok := strings.CutPrefix(name, "Queue."); ok && links[method] == "" {
			links[method] = name
		}
	}
	delete(links, "ID") // they are words as well
	delete(links, "JSON")
	return links
}

// TestDocLinks: a comment links each exported name that it mentions, at least once.
func TestDocLinks(t *testing.T) {
	t.Parallel()
	inRoot(t)
	fset, p := documentation(t)
	links := linkNames(p)
	word := regexp.MustCompile(`\[?\*?[A-Za-z]\w*(\.[A-Za-z]\w*)*\]?`)
	found := 0
	for _, c := range commentsOf(p) {
		var linked, bare []string
		for line := range strings.Lines(c.text) {
			if strings.HasPrefix(line, "\t") || strings.HasPrefix(line, "# ") {
				continue
			}
			for _, w := range word.FindAllString(line, -1) {
				name := strings.Trim(w, "[*]")
				if w[0] == '[' {
					linked = append(linked, name, name[strings.LastIndex(name, ".")+1:])
				} else if link, ok := links[name]; ok && !slices.Contains(c.own, name) && !slices.Contains(c.own, link) {
					bare = append(bare, name)
				}
			}
		}
		found += len(linked)
		for _, name := range bare {
			if !slices.Contains(linked, name) {
				t.Errorf("%s: %s is no link: [%s]", fset.Position(c.pos), name, links[name])
			}
		}
	}
	require.Greater(t, found, 500)
}
