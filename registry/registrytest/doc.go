// Package registrytest holds what tests need around package registry: an in-memory registry.Log that can be made to fail (NewLog),
// and the suite that every Log passes (TestLog). Nothing outside tests imports it.
package registrytest
