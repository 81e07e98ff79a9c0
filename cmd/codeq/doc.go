// Command codeq inspects and controls a queue: in a closed directory, in another process that
// serves it on this machine, or behind the dashboard of codeqweb.
//
//	codeq [-dir DIR | -url URL] VERB [flags] [arguments]
//
// "codeq help" is the reference; README.md beside this file has the details.
//
// Each verb, or small group of verbs, has a file. target.go opens the queue of -dir or -url, and
// output.go writes all output: tables and lines as text, or JSON. escape.go escapes text from
// tasks, so that no payload, name or error can control the terminal.
package main
