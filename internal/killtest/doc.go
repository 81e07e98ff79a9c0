// Package killtest has the tests that kill processes: of a queue by itself, and of the nodes of a
// cluster. It uses the API alone.
package killtest
