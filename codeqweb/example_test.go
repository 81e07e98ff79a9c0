package codeqweb_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"

	"codeq"
	"codeq/codeqweb"
)

// The dashboard is mounted below a path of the application's own server, behind its own
// authentication. Operators may act; others may look.
func ExampleHandler() {
	dir, err := os.MkdirTemp("", "codeqweb")
	check(err)
	defer os.RemoveAll(dir)
	q, err := codeq.Open(dir, nil)
	check(err)
	defer q.Close()
	_, err = q.Produce(context.Background(), codeq.Task{Queue: "mail"})
	check(err)

	dashboard := codeqweb.Handler(q, &codeqweb.Options{
		Hosts: []string{"jobs.example.com"},
		Access: func(r *http.Request) codeqweb.Access {
			switch user, _, _ := r.BasicAuth(); user { // a server in front has checked the password
			case "":
				return codeqweb.None
			case "operator":
				return codeqweb.All &^ codeqweb.Payloads
			default:
				return codeqweb.Read
			}
		},
		Audit: func(r *http.Request, e *codeqweb.Entry) {
			e.User, _, _ = r.BasicAuth()
			fmt.Println(e.User, "did", e.Action, "to", e.Target)
		},
	})
	defer dashboard.Close()
	mux := http.NewServeMux()
	mux.Handle("/codeq/", http.StripPrefix("/codeq", dashboard))

	for _, c := range [][3]string{{"", "GET", ""}, {"ada", "GET", ""}, {"ada", "POST", "api/v1/pause?queue=mail"}, {"operator", "POST", "api/v1/pause?queue=mail"}} {
		r := httptest.NewRequest(c[1], "https://jobs.example.com/codeq/"+c[2], nil)
		if c[0] != "" {
			r.SetBasicAuth(c[0], "")
		}
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, r)
		fmt.Println(c[1], w.Code, strings.Contains(w.Body.String(), "<title>Overview"))
	}
	// Output:
	// GET 403 false
	// GET 200 true
	// ada did pause to mail
	// POST 403 false
	// operator did pause to mail
	// POST 200 false
}

// A dashboard that is not needed any more ends before its queue does.
func ExampleDashboard_Close() {
	dir, err := os.MkdirTemp("", "codeqweb")
	check(err)
	defer os.RemoveAll(dir)
	q, err := codeq.Open(dir, nil)
	check(err)
	defer q.Close()
	dashboard := codeqweb.Handler(q, nil)
	check(dashboard.Close())

	w := httptest.NewRecorder()
	dashboard.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://localhost/readyz", nil))
	fmt.Println(w.Code)
	// Output: 503
}

func ExampleAccess() {
	operator := codeqweb.Read | codeqweb.Act
	fmt.Println(operator, operator.Has(codeqweb.Payloads))
	// Output: read+act false
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
