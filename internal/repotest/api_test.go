package repotest

import (
	"bytes"
	"flag"
	"go/ast"
	"go/constant"
	"go/printer"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var updateAPI = flag.Bool("api.update", false, "TestAPI writes the files of the directory api")

// TestAPI: the files of the directory api list the exported API of each package, so that the diff
// of a commit shows a change of the API.
func TestAPI(t *testing.T) {
	t.Parallel()
	inRoot(t)
	for name, dir := range map[string]string{
		"codeq": ".", "codeqtest": "codeqtest", "codeqweb": "codeqweb", "codeqprom": "codeqprom", "codeqotel": "codeqotel",
		"codeqsql": "codeqsql",
	} {
		lines := apiOf(t, dir)
		require.NotEmpty(t, lines, dir)
		path := filepath.Join("api", name+".txt")
		if *updateAPI {
			require.NoError(t, os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644))
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		listed := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
		var changes strings.Builder
		for _, line := range listed {
			if _, ok := slices.BinarySearch(lines, line); !ok {
				changes.WriteString("\n-" + line)
			}
		}
		for _, line := range lines {
			if !slices.Contains(listed, line) {
				changes.WriteString("\n+" + line)
			}
		}
		require.Empty(t, changes.String(),
			"the API of %s is not what %s lists. If you mean the change: run make api, and commit the file with the code", name, path)
		require.Equal(t, lines, listed, "run make api: %s is not sorted", path)
	}
}

// apiOf returns the exported API of a package, sorted: a line for each constant, variable,
// function, type, method, field of a struct, and method of an interface. It reads the source only:
// it shows the expression in place of a value that comes from another package.
func apiOf(t *testing.T, dir string) []string {
	p := declaredIn(t, dir)
	var lines []string
	add := func(parts ...string) { lines = append(lines, strings.Join(parts, "")) }
	for _, file := range p.files {
		for _, decl := range file.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				of := receiver(d)
				switch signature := strings.TrimPrefix(source(t, withoutNames(d.Type)), "func"); {
				case !d.Name.IsExported() || of != "" && !ast.IsExported(of):
				case of != "":
					add("method (", source(t, d.Recv.List[0].Type), ") ", d.Name.Name, signature)
				default:
					add("func ", d.Name.Name, signature)
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch s := spec.(type) {
					case *ast.TypeSpec:
						if s.Name.IsExported() {
							lines = append(lines, apiOfType(t, s)...)
						}
					case *ast.ValueSpec:
						for n, name := range s.Names {
							switch {
							case !name.IsExported():
							case d.Tok == token.CONST:
								add("const ", name.Name, apiOfConst(t, p.defs[name].(*types.Const), s, n))
							case s.Type != nil:
								add("var ", name.Name, " ", source(t, s.Type))
							default:
								require.Regexp(t, "^Err[A-Z]", name.Name, "declare its type")
								add("var ", name.Name, " error")
							}
						}
					}
				}
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines) // files for several operating systems
}

// apiOfConst is the type of a constant, unless it has none, and its value.
func apiOfConst(t *testing.T, c *types.Const, s *ast.ValueSpec, n int) (text string) {
	if typ, ok := c.Type().(*types.Named); ok {
		text = " " + typ.Obj().Name()
	} else if s.Type != nil { // another package's
		text = " " + source(t, s.Type)
	}
	if c.Val().Kind() != constant.Unknown {
		return text + " = " + c.Val().ExactString()
	}
	require.Greater(t, len(s.Values), n, "%s: its value follows from another package's", c.Name())
	return text + " = " + source(t, s.Values[n])
}

func apiOfType(t *testing.T, s *ast.TypeSpec) (lines []string) {
	head := "type " + s.Name.Name
	if s.TypeParams != nil {
		head += strings.TrimSuffix(strings.TrimPrefix(source(t, &ast.FuncType{TypeParams: s.TypeParams, Params: new(ast.FieldList)}), "func"), "()")
	}
	var kind string
	var members *ast.FieldList
	switch of := s.Type.(type) {
	case *ast.StructType:
		kind, members = " struct", of.Fields
	case *ast.InterfaceType:
		kind, members = " interface", of.Methods
	default:
		if s.Assign.IsValid() {
			head += " ="
		}
		return []string{head + " " + source(t, withoutNames(s.Type))}
	}
	lines = append(lines, head+kind)
	for _, m := range members.List {
		typ := source(t, withoutNames(m.Type))
		if kind == " interface" {
			typ = strings.TrimPrefix(typ, "func")
		} else {
			typ = " " + typ
		}
		if m.Tag != nil {
			typ += " " + m.Tag.Value
		}
		if len(m.Names) == 0 {
			lines = append(lines, head+kind+", embedded"+typ)
		}
		for _, name := range m.Names {
			if name.IsExported() {
				lines = append(lines, head+kind+", "+name.Name+typ)
			} else if kind == " interface" {
				lines = append(lines, head+kind+", with a method that is not exported")
			}
		}
	}
	return lines
}

// withoutNames removes the names of arguments and results from the type of a function.
func withoutNames(typ ast.Expr) ast.Expr {
	f, ok := typ.(*ast.FuncType)
	if !ok {
		return typ
	}
	unnamed := func(list *ast.FieldList) *ast.FieldList {
		if list == nil {
			return nil
		}
		short := new(ast.FieldList)
		for _, field := range list.List {
			for range max(1, len(field.Names)) {
				short.List = append(short.List, &ast.Field{Type: withoutNames(field.Type)})
			}
		}
		return short
	}
	return &ast.FuncType{TypeParams: f.TypeParams, Params: unnamed(f.Params), Results: unnamed(f.Results)}
}

// source prints a type, or an expression, in one line.
func source(t *testing.T, of ast.Expr) string {
	var b bytes.Buffer
	require.NoError(t, printer.Fprint(&b, token.NewFileSet(), of))
	return strings.Join(strings.Fields(b.String()), " ")
}
