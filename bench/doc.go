// Package bench measures codeq: go test ./bench -run '^$' -bench .
//
// Every benchmark but the raw, the idle and the due ones runs for a warm-up and a
// window, by the clock and not by b.N; use -benchtime 1x with a window shorter
// than a second. Flags: -warmup, -window, -profiles DIR.
//
// A cycle is one task produced, claimed and completed. cycles/s is min(created, completed) of the
// window divided by its length; a run in which completions fall behind creations is discarded, and
// says so.
package bench
