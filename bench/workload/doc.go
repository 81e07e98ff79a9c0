// Package workload puts a queue under load and measures it: the same load for
// codeq in its benchmarks, for codeq over hours, and for other queues beside it.
//
// A cycle is one task produced, claimed and completed. The rate of a window is min(created,
// completed) divided by its length; discard a window that fell behind (Result.FellBehind).
package workload
