// Command codeq looks at a queue and steers it: one in a directory that nobody has open, one that
// another process has open and serves on this machine, or one behind the dashboard of codeqweb.
//
//	codeq [-dir DIR | -url URL] VERB [flags] [arguments]
//
// "codeq help" is the reference; README.md beside this file says the same at more length.
//
// Each verb, or small group of verbs, has a file. target.go opens what -dir and -url name, and
// output.go writes everything: tables and lines for people, JSON for programs. What comes from
// tasks goes through escape.go, so that no payload, name or error can steer the terminal.
package main
