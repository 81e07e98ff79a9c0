// Package report writes down what the programs of bench have measured: a
// Markdown file that says on what machine, when, of which commit and by which
// command, with tables and with charts in SVG. It runs on Linux.
package report
